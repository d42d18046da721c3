"""Nouns, messages, state machines, config and errors. Pure: knows no clock, socket, thread or chance."""

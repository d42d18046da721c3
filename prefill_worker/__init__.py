"""The prefill role: it turns prompts into KV blocks, draws the first token, and hands both on.

policy  chunks, which of them finishes which blocks, whose turn it is; pure
job     one prompt here, and how far it is
worker  the role's calls and its loop of engine steps
actor   its Ray wrapper
"""

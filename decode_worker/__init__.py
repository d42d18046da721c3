"""The decode role: it reserves room, takes KV in or makes it, and turns it into tokens.

policy         what fits, who is admitted, who is preempted, who runs next; pure
life           one request's states, as far as blocks and steps go; pure
roster         all of them over the pool's ledger: plans the next step; pure
sequence       one request's tokens, and what its router is told
batch          the loop of engine steps
handoff_calls  what prefill workers say about their tickets
worker         the role's calls
actor          its Ray wrapper
"""

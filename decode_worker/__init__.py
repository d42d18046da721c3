"""The decode role: it reserves room, takes KV in, and turns it into tokens.

policy    what fits, how much room a request gets, who runs next; pure
sequence  one request here, and its exact place in the KV
batch     the loop of engine steps over all that run
worker    the role's calls
actor     its Ray wrapper
"""

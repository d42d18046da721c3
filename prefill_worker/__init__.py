"""The prefill role: it turns prompts into KV blocks, draws the first token, and hands both on.

policy  what fits, and which chunk finishes which blocks; pure (whose turn it is: pd_worker.policy)
job     one prompt here, and how far it is
worker  the role's calls and its loop of engine steps
actor   its Ray wrapper
"""

"""Runs a model over a paged KV pool: decoder, attention kernels, sampler. Synchronous; knows no network and no Ray."""

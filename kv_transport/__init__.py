"""Moves whole KV blocks between pools under tickets.

interface   what every path implements; the contract
digest      xxh3-64 of a block
permits     who may write into which slots, and who is inside them: the quarantine rule, pure
reception   what the receiving side of every path shares: events, counters, closing a ticket
tcp         options of the path "tcp"; tcp_receiver and tcp_sender are its two sides
inproc      the path "inproc": within one process, with seeded faults; for tests
choice      picks the first address of a ticket that this process can write to
"""

"""Moves whole KV blocks between pools under tickets.

interface     what every path implements; the contract
digest        xxh3-64 of a block
pairing       whose KV may go into whose pool

permits       who may write into which slots, and who is inside them: the quarantine rule, pure
reception     what the receiving side of every path shares: events, counters, closing a ticket
receiver      a pool's receiving side over any number of paths, with one reception for all
socket_listener, writer_acceptor, connection   the receiving side over sockets: where writers come in, the thread that
              accepts them, the thread that serves one

channel_sender, channel, push_job   the sending side over sockets: a queue, a thread, a connection for each destination
choice        the best path of a ticket that works; path_book remembers what was found, pure

shm           the path "shm": workers of one host; shm_receiver and shm_sender are its two sides, shm_pool the memory
tcp           the path "tcp"; tcp_receiver and tcp_sender are its two sides
inproc        the path "inproc": within one process, with seeded faults; for tests
"""

"""Moves whole KV blocks between pools under tickets.

interface     what every path implements; the contract
digest        xxh3-64 of a block
pairing       whose KV may go into whose pool

permits       who may write into which slots, and who is inside them: the quarantine rule, pure
reception     what the receiving side of every path shares: events, counters, closing a ticket
landing       where the bytes of a frame go, and how they become the pool's: at once, or by way of a ring
receiver      a pool's receiving side over any number of paths, with one reception for all
socket_listener, writer_acceptor, connection   the receiving side over sockets: where writers come in, the thread that
              accepts them, the thread that serves one

channel_sender, channel_group, channel, push_job   the sending side over sockets: a group for each destination, in it
              channels with a queue, a thread and a connection each; stripes decides how many a push takes, pure
doorbell_frames, doorbell_connection, answer_reader   what shm and ucx share: the sender says that blocks are ready, the
              receiver when it has them
dialing, body_reader   sockets by name and port; frames from a socket that blocks

choice        the best path of a ticket that works, of those in paths; path_book remembers what was found and path_tally
              counts it, both pure

shm           the path "shm": workers of one host; shm_receiver and shm_sender are its two sides, shm_pool the memory
tcp           the path "tcp"; tcp_receiver and tcp_sender are its two sides, tcp_stream its bytes with and without TLS
ucx           the path "ucx"; ucx_receiver and ucx_sender are its two sides, with ucx_connection, ucx_pair and ucx_side
              in them; ucx_probe and ucx_offer say whether it is used
inproc        the path "inproc": within one process, with seeded faults; for tests
"""

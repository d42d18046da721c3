"""Calls between workers, store and router: framed msgpack over TCP, authenticated both ways.

limits      every bound and every wait, in one struct
frames      header + body: where one message ends and the next begins
wire        the message types of a connection, and PeerIdentity
auth        the HMAC challenge: bytes in, bytes out
handshake   Hello, Proof, Ready: the states of a connection before its first call
connection  sans-IO core that both sides share; client_core and server_core add the calls
link        asyncio shell of a core: a protocol, two timers, no decisions
client      RpcClient: call and stream
server      RpcServer: a handler is an async generator
blocking    the same handshake on a blocking socket, for data connections
tls         mutual TLS by config, sans-IO in tls_session; tls_protocol and tls_socket put it between a connection and
            its socket, in asyncio and in blocking threads
"""

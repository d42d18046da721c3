"""Path "ucx": blocks over UCX (RDMA where there is any, else its TCP). Bounds and waits, and what a connection is for.

    sender                                              receiver
    control connection: handshake, UCX addresses, greeting over UCX itself
    push: doorbell  -------------------------------->   its thread posts a receive into a slot of its own ticket for
           <---------------------------- ready -------  every block that it wants
    a tag send for each of these  ==== UCX =========>   digest of each block as it completes
    our blocks may change again  <------ taken -------

Nothing is sent before its receive is posted, so that nothing ever waits unexpected in the receiver's UCX, and a late
doorbell costs no bytes. See docs/adr/0004-ucxx-for-ucx-py.md, and docs/wire-format.md, "UCX connections".
"""

from __future__ import annotations

from kv_transport.tcp import MIB, TcpOptions

PATH = "ucx"
CONTROL_KIND = "kvrelay kv ucx"
"""`kind` of the handshake of these connections; a proof made for any other is wrong here."""


class UcxOptions(TcpOptions, frozen=True, kw_only=True):
    """Those of tcp are the control connection's.

    max_frame_bytes: most KV bytes that one doorbell names (one block, if a block is larger); what arrived is told
                     after each
    """

    max_frame_bytes: int = 32 * MIB


DEFAULT_OPTIONS = UcxOptions()

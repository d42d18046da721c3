"""What both roles of worker are made of.

memory         the pool's bytes, shared with other processes to read; huge_pages makes their pages large
worker_pool    the pool as the worker has it: in memory, or on a device with a ring of memory beside it
device_ring    that ring; ring_slots is who has which slot, pure; copier the thread that has the device copy;
               ring_blocks and ring_landing are its faces towards pushes and towards frames
outgoing_blocks   how blocks get to where the sender reads them
policy         whose prompt is computed next, and how far; pure
engine_thread  the one thread that runs the engine
step_run       one engine step for several requests, of which one may fail alone
incoming       tickets that we issued: permission, arrival, commit, quarantine
verdict        when the receiver answers that blocks are missing; pure
outgoing       handoffs that we make: push, lease, verdict, release
path_probe     how fast each path to another worker is; probe_target takes such pushes in
control        connections to the workers that our handoffs go to
outbox         tokens on their way to the router, bounded
guard          callbacks whose faults end the boot
counters       totals for the heartbeat
open_requests  which requests still hold anything
room_news      tells watchers that there is room again
shell          server, heartbeat, ledger report, drain, stop
build          config -> engine and memory
process        what an actor does to its own process: cores, log file
"""

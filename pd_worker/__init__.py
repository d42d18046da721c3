"""What both roles of worker are made of.

memory         the pool's bytes, shared with other processes to read; huge_pages makes their pages large
policy         whose prompt is computed next, and how far; pure
engine_thread  the one thread that runs the engine
step_run       one engine step for several requests, of which one may fail alone
incoming       tickets that we issued: permission, arrival, commit, quarantine
verdict        when the receiver answers that blocks are missing; pure
outgoing       handoffs that we make: push, lease, verdict, release
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

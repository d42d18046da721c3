"""What both roles of worker are made of.

memory         the pool's bytes
blocks         which blocks a range of tokens needs; pure
engine_thread  the one thread that runs the engine
incoming       tickets that we issued: permission, arrival, commit, quarantine
verdict        when the receiver answers that blocks are missing; pure
outgoing       handoffs that we make: push, lease, verdict, release
control        connections to the workers that our handoffs go to
outbox         tokens on their way to the router, bounded
guard          callbacks whose faults end the boot
counters       totals for the heartbeat
shell          server, heartbeat, ledger report, drain, stop
build          config -> engine and memory
process        what an actor does to its own process: cores, log file
"""

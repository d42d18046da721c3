"""Benchmarks and their report. What each figure means is in docs/benchmarks.md.

all_benches     the benches by name; each is one file, `*_bench`, whose docstring says what is measured and how
lab             what a bench is given; running: runs one and makes its report
clusters        the cluster under test, as far as a bench sees it; starting one is handed in from above
report, report_table, summary   what comes out; pure
floor           the least time that a step can take on this machine; pure
machine_bounds, machine_rates   what the machine can do at best

Measured in processes of their own, tied to cores (child_process):
transfer_process, transfer_messages             the two sides of a transfer; transfer_pair: the bench's side of them
transfer_halves what both sides of a way to move KV have to offer; transfer_makers: who makes them
own_paths, bare_*, call_ways, peer_*            the ways: our paths, the least possible, calls, others' libraries
transfer_ways, transfer_checks                  what is compared with what, and what comes out; pure
engine_client   the bare engine, and the machine's rates: the bench's side
engine_messages what is asked and answered
engine_process, engine_answers, engine_work     the process's side; prototype_process: another one that can be asked

Requests go over HTTP:
gateway         a running cluster as its clients reach it; streams: many at once
http_client     writes down what comes when; http_reply, completion_stream, request_timeline read it afterwards; pure
"""

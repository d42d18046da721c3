"""HTTP gateway, cluster view, placement, and the life of a request over its two workers.

view, policy, queue        pure: who is alive and how full, where a request goes, who waits
request_run, serving       one request's shell; all requests: turns, deadlines, lost workers
choices, rounds            what runs bring, handed to who writes the reply: once for all that the loop has read
worker_link, fleet         a connection to each worker, and the view made from what they say
chat_*, prompt, http_*     from HTTP to token ids and back
faults                     that a part has failed without which nothing goes on
service, actor             all of it in one process; the same as a Ray actor
"""

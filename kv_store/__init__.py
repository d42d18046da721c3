"""Keeps the KV of idle sessions: in DRAM, and on NVMe.

policy        what is kept when room is short: LRU, and by expected use; forest, ticket_heap and return_times are parts
              of it; all pure
costs         whether restoring or computing again is quicker, fitted live by robust_fit; pure

slot_format   what lies on the disk, to the byte; pure
nvme_index    which slot holds which block, and in what state it is; pure
nvme_room     where the room for one more block comes from: quota, growth, eviction; pure
nvme_health   what the disk can do at the moment, and when to try again; pure
nvme_eviction what the tier asks of the object that decides what to keep

nvme_files    every call that reaches the disk: the seam at which tests break it
nvme_folder, nvme_set   the tier's folder with its lock; the open files of one fingerprint
nvme_threads  the threads that do it, a bounded number
nvme_jobs     what one of them does for one block
nvme_tier     the tier for its caller; nvme_writer, nvme_keeper and nvme_opening are parts of it
"""

"""From a config to running, supervised actors, and the command line.

config_file  one YAML file and the flags that override it
sizes        pure: pool sizes, threads, cores and GPUs of every worker
machine      what this machine has: cores, memory, GPUs; machine_facts says more of it, for people
model_size   what the model needs: bytes of a block, of the weights
native_kernels  the kernels' library, built before the workers need it
preflight    start-up checks, in clear sentences
processes    ending a process for certain
ray_runtime  a private Ray of our own: started, and gone without a trace
ray_room     whether Ray has what the actors will ask for
ray_watch    sees a process of Ray itself die; then the run ends at once
orphans      whoever Ray leaves behind becomes our child, and can be ended
asking       calls to actors, each with a deadline
actors       which classes fill the seats
seat         one place in the cluster that an actor fills, boot after boot; of two kinds: router_seat, worker_seat
policy       pure: life of a seat: when to suspect, kill and start again
keeper       feeds one seat's life with events and carries out its commands
supervisor   all keepers; tells the router who is alive
launch       Cluster: start and stop of the whole
status       `kvrelay status`: a map of a running cluster
doctor       `kvrelay doctor`: probes every pair of workers through the router (router_http), or this host (local_probe)
diagnosis    pure: what that has found and whether it is well; handoff_tax: what it costs, doctor_report: as text
up           one run of `kvrelay up`, from the first check until nothing is left
progress, stop_signals, log_files   what such a run shows, heeds and writes down
cli          `kvrelay`: signals first (early_signals), then the commands (commands, bench_command, doctor_command)
bench_cluster   clusters for benches: `kvrelay up` as a process
"""

"""From a config to running, supervised actors, and the command line.

config_file  one YAML file and the flags that override it
sizes        pure: pool sizes, threads and cores of every worker
machine      what this machine has: cores, memory
model_size   what the model needs: bytes of a block, of the weights
preflight    start-up checks, in clear sentences
ray_runtime  a private Ray of our own: started, and gone without a trace
seat         one place in the cluster that an actor fills, boot after boot
policy       pure: life of a seat: when to suspect, kill and start again
keeper       feeds one seat's life with events and carries out its commands
supervisor   all keepers; tells the router who is alive
launch       Cluster: start and stop of the whole
cli          `kvrelay`
"""

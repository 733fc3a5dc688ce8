"""Measuring the machine that is here, with real processes.

probe.py     the public function, and its cache
machine.py   what this machine is: cores, memory, versions
launch.py    workers started, watched, and ended
worker.py    one worker: the rounds of measurement
compute.py   products, copies, contention      (in the worker)
messages.py  messages and collectives          (in the worker)
shares.py    equal shares between ranks        (in the worker, and in the engine)
staging.py   the same of a GPU's tensors       (in the worker, and in the engine)
parts.py     copies, messages, additions       (in the worker)
overlap.py   compute beside communication      (in the worker)
fit.py       samples of all workers to the values of a cluster
"""

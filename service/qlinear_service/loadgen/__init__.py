"""What `qlinear load` is made of: what is sent when, what came back, and whether it is right.

Everything here but `progress` and `report` is free of input and output and takes its clock as an
argument; `commands/load.py` adds the client.
"""

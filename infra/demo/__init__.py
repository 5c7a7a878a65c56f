"""The demo: a bank's life, sent through everything while it is being killed, the proof, and how the next release takes over."""

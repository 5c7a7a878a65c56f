"""The demo: a bank's life, sent through everything while it is being killed, and the proof that nothing went wrong."""

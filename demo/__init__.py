"""The sample bank under fire: loads transactions, kills processes, and proves that nothing was lost or doubled.

Not part of a new service: delete it when you like.
"""

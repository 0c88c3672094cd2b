"""Recovery: when a run has been hurt, how far it goes back, what it leaves out, and when it gives up.

Everything here runs on the host and in plain Python numbers, so that both frameworks decide alike. The
adapters capture a state, put one back, and report what they find in it.
"""

"""The guard in trainers: one module per partner, which imports it when it is used."""

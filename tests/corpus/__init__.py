"""What stablenum says of the programs of ``corpus``, and whether labels, runner and page are right."""

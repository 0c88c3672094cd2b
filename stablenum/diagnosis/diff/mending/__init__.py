"""Mend one program of a pair in its source: rewrites of single expressions, proposed by causes and tried."""

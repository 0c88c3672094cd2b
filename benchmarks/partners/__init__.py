"""How partners' training loops fare with one bad batch, alone and with a guard."""

"""Pure drawing: each function takes axes and plain numbers, and draws. Colours: ledger.palette."""

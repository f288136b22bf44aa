"""The machine at hand: what it has, how a report describes it without naming anybody, and processes of their own."""

"""The conclusions from what the probes saw: a check looks at the observations, and makes a finding or some."""

"""Which class or function computes what a kernel computes, and what it is where none does."""

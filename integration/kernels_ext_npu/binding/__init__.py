"""What puts a forward, an attribute or an entry of a table in place of another, and takes it out again."""

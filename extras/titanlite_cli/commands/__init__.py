"""One module for each command of `titanlite` that no other package has."""

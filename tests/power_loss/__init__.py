"""A simulated power loss: the file operations of a real writer, and every disk that may be left."""

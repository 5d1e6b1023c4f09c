"""The bytes of the samples of a request, into a buffer."""

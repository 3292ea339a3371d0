"""The native dispatcher of GPU servers: queue, batches and device in one thread without Python."""

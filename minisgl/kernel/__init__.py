"""What depends on the device and is not attention: choosing it, its memory, copies to and from it."""

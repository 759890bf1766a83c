"""Turns with advantages in, new adapter and critic weights out."""

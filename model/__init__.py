"""The network and how text comes out of it."""

"""The version that heartbeats carry."""

VERSION = "0.1.0"

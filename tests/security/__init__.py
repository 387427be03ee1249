"""Tests of what is defended, across the parts of the product."""

"""The paper's tables and ours on real data, with the product's own code; see README.md beside this file."""

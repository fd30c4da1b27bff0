"""The report: results folders as one HTML file."""

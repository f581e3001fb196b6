"""The request, the search for layouts, their cost, and what plan.py prints."""

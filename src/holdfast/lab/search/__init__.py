"""The search: clients, a server and faults as states and transitions, explored in every order."""

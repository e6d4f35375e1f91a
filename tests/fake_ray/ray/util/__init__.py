"""Addresses of the fake cluster: this machine."""

bundles = []


def get_node_ip_address():
    return "127.0.0.1"

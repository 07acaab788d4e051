"""``holdfast doctor`` on etcd."""

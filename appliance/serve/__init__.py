"""One ServeSpec, started on this host, in Docker or in Kubernetes."""

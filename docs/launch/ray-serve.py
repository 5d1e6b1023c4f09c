"""Collation servers on a Ray cluster: one actor a node, each with a server of its own.

    python docs/launch/ray-serve.py data/cord data/chat --servers 4 --workers 32 --memory 16G

Run it with the same environment on all nodes; all nodes must be able to read DATA. It prints the address for the loader
and waits. Ctrl-C ends the servers. The network is taken to be trusted (insecure=True); give certificates where it is
not (docs/service.md). Ray starts an actor again that was lost, at the same port.
"""

from __future__ import annotations

import argparse
import time

import ray

from vlmdata.cli.serve import parse_bytes


@ray.remote(max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD")
class CollationActor:
    """A server in a process of Ray.

    Args:
        data: Dataset directories or URLs.
        options: Options of :class:`vlmdata.service.server.config.ServerConfig`.
    """

    def __init__(self, data: list[str], options: dict[str, object]):
        from vlmdata.service.server.config import ServerConfig
        from vlmdata.service.server.server import CollationServer

        self._server = CollationServer(data, ServerConfig(**options))

    def address(self) -> str:
        """Returns host and port."""
        return f"{ray.util.get_node_ip_address()}:{self._server.port}"

    def close(self) -> None:
        """Lets answers under way end."""
        self._server.close()


def main() -> None:
    """Starts the servers and waits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--port", type=int, default=8815, help="the same on each node, so at most one server per node")
    parser.add_argument("--workers", type=int, default=4, help="CPUs of each server")
    parser.add_argument("--memory", default="4G", help="packs and plans of each server")
    args = parser.parse_args()
    ray.init(log_to_driver=True)
    options = {
        "host": "0.0.0.0",
        "port": args.port,
        "workers": args.workers,
        "memory": parse_bytes(args.memory),
        "insecure": True,
    }
    actor = CollationActor.options(num_cpus=args.workers)
    servers = [actor.remote(args.data, options) for _ in range(args.servers)]
    print("grpc://" + ",".join(sorted(ray.get([each.address.remote() for each in servers]))), flush=True)
    try:
        while True:
            time.sleep(60)
    except KeyboardInterrupt:
        ray.get([each.close.remote() for each in servers])


if __name__ == "__main__":
    main()

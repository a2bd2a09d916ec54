"""The server of stage 8 with the scheduler process of `instant_scheduler`. Takes the server's own flags."""

from minisgl.stage8 import launch, serve

if __name__ == "__main__":
    launch.SCHEDULER = "minisgl.benchmark.instant_scheduler"
    raise SystemExit(serve.main())

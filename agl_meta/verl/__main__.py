"""Run :func:`agl_meta.verl.entrypoint.main`."""

from agl_meta.verl.entrypoint import main

if __name__ == "__main__":
    main()

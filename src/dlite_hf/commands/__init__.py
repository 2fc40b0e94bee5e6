# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.

-- Reads for wrk: `wrk -t1 … -s rows.lua URL -- PREFIX ROWS SEED`. Each asks for one row that exists, at random: PREFIX with six
-- digits below ROWS. Prints one line of JSON at the end; times are in microseconds.

local threads = {}

function setup(thread)
  table.insert(threads, thread)
end

function init(arguments)
  prefix, rows = arguments[1], tonumber(arguments[2])
  math.randomseed(tonumber(arguments[3]))
  sent, succeeded, others = 0, 0, 0
end

function request()
  sent = sent + 1
  return wrk.format("GET", string.format("%s%06d", prefix, math.random(0, rows - 1)))
end

function response(status)
  if status == 200 then
    succeeded = succeeded + 1
  else
    others = others + 1
  end
end

function done(summary, latency)
  local thread = threads[1]
  io.write(string.format(
    '{"sent":%d,"succeeded":%d,"others":%d,"errors":%d,"timeouts":%d,"us":%d,"p50_us":%d,"p99_us":%d,"max_us":%d}\n',
    thread:get("sent"), thread:get("succeeded"), thread:get("others"),
    summary.errors.connect + summary.errors.read + summary.errors.write, summary.errors.timeout,
    summary.duration, latency:percentile(50), latency:percentile(99), latency.max
  ))
end

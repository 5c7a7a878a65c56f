-- Deposits for wrk: `wrk -t1 … -s deposits.lua URL -- TURN ACCOUNTS`. The nth request of a turn has the key "TURN-n" and is for the
-- account (7919 n) mod ACCOUNTS, of 1 + n mod 100 cents. Prints one line of JSON at the end; times are in microseconds.

local threads = {}

function setup(thread)
  table.insert(threads, thread)
end

function init(arguments)
  turn, accounts = arguments[1], tonumber(arguments[2])
  sent, succeeded, others = 0, 0, 0
end

function request()
  sent = sent + 1
  local path = string.format("/accounts/%06d/deposit", sent * 7919 % accounts)
  local headers = { ["Content-Type"] = "application/json", ["Idempotency-Key"] = string.format('"%s-%d"', turn, sent) }
  return wrk.format("POST", path, headers, string.format('{"cents":%d,"on":"2026-01-02"}', 1 + sent % 100))
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

--[[
Takes the group away from its holder, by an operator's order. Served: the job's state must be off the device, by force
if need be, before anybody is granted. Lock-only: nobody is granted before the old lease's time is over.
ARGV  1 floor  2 lease id  3 token  4 by whom  5 why, or ''  6 '1': a lock-only group is free at once
Reply ok mode ms_before_the_next_grant (lock-only) | not_holder holder_job holder_token
Events LeaseRevoked, and what advance and reap emit
--]]
-- @include group waiters gangs residency lease advance
local lease, token, by, why, at_once = ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6] == '1'

begin(true)
settle_clock()
reap() -- a lease whose time is over is reclaimed, not revoked
if S.lease_id == lease and S.token == token then
  local job, deadline, ran = S.job, S.deadline_ms, S.confirmed == '1'
  end_lease('LeaseRevoked', 'by', by, 'reason', why)
  remember_ended(lease)
  set('revoked', token)
  set('revoked_lease', lease)
  set('revoked_job', job)
  set('revoked_by', by)
  local key = grant_prefix .. lease -- its client learns who it was, whether it waits there for its grant or renews
  redis.call('XADD', key, '*', 'kind', 'cancelled', 'by', by, 'reason', why)
  redis.call('EXPIRE', key, GRANT_KEEP_S)
  if S.mode == 'served' then
    set('evict', job)
    set('evict_how', 'must')
    set('evict_reason', '')
    set('evict_until_ms', 0)
    set('force', '1')
  elseif ran and not at_once and deadline > S.quiet_until_ms then
    set('quiet_until_ms', deadline)
    set('quiet_why', by .. ' took it from job ' .. job .. ', which may not know before @' .. digits(deadline))
  end
elseif taken_by(lease) == '' and redis.call('HGET', state_key, 'revoked') ~= ARGV[3] then
  advance()
  save()
  return { 'not_holder', S.job, S.token }
elseif at_once and S.quiet_why ~= '' then
  set('quiet_until_ms', 0)
  set('quiet_why', '')
end
advance()
save()
return { 'ok', S.mode, math.max(S.quiet_until_ms - now, 0) }
